"""The demo checkpoint's tokenizer: a word of the world's prompts is a token, any other byte its own. Pure."""

from shared_runtime.demo.prompts import vocabulary
from shared_runtime.tiny import SPECIAL_TOKENS, Json, byte_vocabulary, tokenizer

FIRST_WORD = 256
"""Id of the first token that is longer than a byte. The special ones come last, where tokenizers puts them."""
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""A space, as byte-level vocabularies write it."""


def merges() -> list[tuple[str, str]]:
    """Which two tokens join to one, first things first: each word grows from its first letter.

    Words begin with a space or a capital, so that no merge begins in the middle of another word.
    """
    words = [word.replace(" ", SPACE) for word in vocabulary()]
    found = ((word[:end], word[end]) for word in words for end in range(1, len(word)))
    return sorted(dict.fromkeys(found), key=lambda pair: (len(pair[0]), pair))


def size() -> int:
    """How many tokens there are."""
    return plain() + len(SPECIAL_TOKENS)


def plain() -> int:
    """How many of them are not special."""
    return FIRST_WORD + len(merges())


def demo_tokenizer() -> Json:
    """The content of `tokenizer.json`."""
    tokens = {left + right: FIRST_WORD + index for index, (left, right) in enumerate(merges())}
    return tokenizer({**byte_vocabulary(), **tokens}, [list(pair) for pair in merges()])
