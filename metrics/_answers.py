"""Exact match and F1 of words between a text and its references, as SQuAD has them.

Source: P. Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016.
"""

import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(text: str, reference: str) -> bool:
    """Return whether two texts have the same words, but for case, punctuation and articles."""
    return _words(text) == _words(reference)


def token_f1(text: str, reference: str) -> float:
    """Return F1 of the words of two texts, in [0, 1]; without words in one of them, 1.0 if the other has none too."""
    found, expected = _words(text), _words(reference)
    if not found or not expected:
        return float(found == expected)
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected))


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()
