"""The exceptions that a command reports in one line."""


class InputError(ValueError):
    """Bad input. The message is one line that names the value, the limit and the way out; the command prints it and exits with status 2."""


class RunFailed(RuntimeError):
    """A run cannot go on. The message is one line; the command prints it and exits with status 1."""
