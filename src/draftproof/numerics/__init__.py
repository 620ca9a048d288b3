"""The pinned arithmetic: float32 operations rounded one by one, and integer masses.

Every function takes ``xp``, the array functions of the inputs' library (``draftproof._arrays``), first. A function
uses only IEEE add, subtract, multiply and divide in float32, bit operations and int64 integers, in the order written:
that order is the contract that makes the bits agree between backends. ``docs/arithmetic.md`` states it in full.
"""
