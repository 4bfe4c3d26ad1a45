"""How near generated texts are to their references: ROUGE-1/2/L (Lin 2004) and BLEU-4 (Papineni et al. 2002).

By rouge-score and sacrebleu, over our own tokens: words of scripts that space them, lower-cased, and single
characters of scripts that do not (Chinese, Japanese, ...). An empty text scores 0.
"""

from __future__ import annotations

import re
from typing import Dict, List, Sequence

# CJK ideographs, kana, Thai, Lao, Burmese, Khmer one by one; other letters and digits in runs; punctuation
# one by one.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+|[^\\w\\s]")


def tokens_of(text: str) -> List[str]:
    """Words and characters that are compared."""
    return _TOKEN.findall(text.lower())


class _Tokenizer:
    tokenize = staticmethod(tokens_of)


def text_metrics(predictions: Sequence[str], references: Sequence[str]) -> Dict[str, float]:
    """rouge1, rouge2, rougeL (mean F1 of the pairs) and bleu4 (of all texts together), each from 0 to 1.

    Raises:
        ValueError: no texts, or not as many of one as of the other.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions and {len(references)} references; expected as many, at least "
            "one."
        )
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, tokenizer=_Tokenizer())
    pairs = [scorer.score(reference, prediction) for prediction, reference in zip(predictions, references)]
    scores = {kind: sum(pair[kind].fmeasure for pair in pairs) / len(pairs) for kind in kinds}
    texts = [[" ".join(tokens_of(text)) for text in side] for side in (predictions, references)]
    bleu = BLEU(tokenize="none").corpus_score(texts[0], [texts[1]])
    return {**scores, "bleu4": bleu.score / 100}
