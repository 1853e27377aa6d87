"""Deploy files: the model of every key, inheritance, overrides, and the checks that need no GPU and no weights."""
