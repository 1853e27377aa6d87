"""How the job store's tables came to be, one step a file, run by Alembic in order at start (`jobs/sql/upgrade.py`).

A step that was released is never changed; it knows nothing of the rest of the program, which goes on.
"""
