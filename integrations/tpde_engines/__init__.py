"""TPDE in inference engines. Importing this package imports nothing else: each module says what it needs.

=================== ==========================================================================
``plugins``         entry points, which register names
``vllm_worker``     the worker half of vLLM's weight transfer
``vllm_trainer``    the trainer half
``sglang``          a custom weight loader, and a receiver
``live``            what they share: the map of a live model, and a thread that receives and checks
=================== ==========================================================================
"""

#: Releases whose source the contract tests have read. Others may work.
TESTED = {"vllm": "0.32.0", "sglang": "0.5.23"}
