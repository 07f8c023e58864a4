"""The one exception for what a user can mend: bad input, a missing file, a setting that cannot work."""


class InputError(ValueError):
    """Bad input. The message is one line that names the value, the limit and the way out; the command prints it and exits with status 2."""
