"""Alembic's changes of the schema, run when a database is opened."""
