"""Jobs: what was asked, how far it is, where its files lie, and who drives it."""
