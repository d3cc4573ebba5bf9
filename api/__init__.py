"""Ways in: the command line.

Imports ``workers``, ``db`` and ``tuner``; nothing imports it. Importing this package imports nothing heavy.
"""
