"""Tenants, keys, adapters and their versions."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO state (id, revision) VALUES (1, 0)")
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("adapters", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=True),
        sa.Column("salt", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_table(
        "adapters",
        sa.Column("base", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("last_version", sa.Integer, nullable=False),
        sa.Column("weights", sa.JSON, nullable=False),
        sa.Column("history", sa.JSON, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("base", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("uid", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("num_virtual", sa.Integer, nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("template", sa.Text, nullable=True),
        sa.Column("created", sa.Float, nullable=False),
        sa.ForeignKeyConstraint(
            ["base", "owner", "name"], ["adapters.base", "adapters.owner", "adapters.name"], ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    for table in ("versions", "adapters", "keys", "tenants", "state"):
        op.drop_table(table)
