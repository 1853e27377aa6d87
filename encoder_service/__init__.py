"""The encoder service: everything that looks at the user's words and media."""
