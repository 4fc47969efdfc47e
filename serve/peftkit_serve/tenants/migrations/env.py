"""How Alembic runs the changes: on the connection that it is given."""

from alembic import context

from peftkit_serve.tenants.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
