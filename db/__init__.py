"""What is remembered: studies, their trials and the published configs, on SQLite or PostgreSQL.

Owns the schema, its migrations and every SQL statement; imports values from ``tuner`` and nothing of
``workers`` or ``api``. The way in is ``db.store.Store``; importing ``db`` alone brings in nothing heavy.
"""
