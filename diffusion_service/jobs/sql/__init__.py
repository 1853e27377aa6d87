"""The job store in a database: SQLite for one service, PostgreSQL for several that share a queue."""
