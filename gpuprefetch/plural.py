"""How is a number of things said?"""

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Say ``1 worker``, ``2 workers``, ``2 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
