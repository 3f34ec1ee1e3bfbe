"""How are things counted and named in a sentence?"""

__all__ = ["counted", "with_article"]


def counted(number: int, noun: str) -> str:
    """Say ``1 worker``, ``2 workers``, ``2 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def with_article(name: str) -> str:
    """Say ``a list``, ``an Identity``, ``an ndarray``."""
    # The n of ndarray is spoken as a letter.
    is_vowel = name[:1] in set("aeiouAEIOU") or name == "ndarray"
    return f"{'an' if is_vowel else 'a'} {name}"
