"""Who does the work: settings, and the loop that tunes on one machine.

Imports ``db`` and ``tuner``, never ``api``. Importing this package imports nothing heavy.
"""
