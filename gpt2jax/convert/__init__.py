"""Foreign weights in and out: one file a format, each a declarative map between its names and ours."""
