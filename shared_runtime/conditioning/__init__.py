"""From a user's words and media to the rows that condition the DiT, and back from rows to what its blocks expect."""
