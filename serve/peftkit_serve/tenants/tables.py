"""The tables, for SQLite and PostgreSQL. `migrations/` makes them; the two are compared by a test."""

import sqlalchemy as sa

metadata = sa.MetaData()

state = sa.Table(
    "state",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),  # grows with every change, so that servers see it
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("adapters", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(12), primary_key=True),
    sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=True),
    sa.Column("salt", sa.LargeBinary, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)

adapters = sa.Table(
    "adapters",
    metadata,
    sa.Column("base", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(128), primary_key=True),  # "" is the operator's
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("last_version", sa.Integer, nullable=False),  # outlives the versions: a number is never used again
    sa.Column("weights", sa.JSON, nullable=False),
    sa.Column("history", sa.JSON, nullable=False),
)

versions = sa.Table(
    "versions",
    metadata,
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
