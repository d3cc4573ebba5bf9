"""What tuning is: workloads, configs, kernel families, measurement, search.

Owns the domain and the algorithms; knows nothing of databases, brokers or ways in.
Importing this package imports nothing heavy: torch, cutlass and triton are touched only by
families, ``measure``, ``verify`` and the two child scripts.
"""

__version__ = "0.1.0"
