"""The error of sizes that do not fit."""


class SizeError(ValueError, AssertionError):
    """Heads, widths or lengths that cannot be shared or do not fit each other.

    An AssertionError too, because Megatron's mixers and Automodel's assert such sizes: a caller who
    catches theirs catches this.
    """
