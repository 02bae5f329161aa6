"""Every causal-LM type of transformers: its text equals stock `generate`'s, or it is refused. Never another text.

`docs/supported_models.md` is this sweep, written out.
"""

import pytest
import sweep


EQUAL = []


@pytest.mark.parametrize("model_type", sweep.MODEL_TYPES)
def test_equal_or_refused(model_type):
    name, reason = sweep.verdict(model_type)
    if name == "not built":
        pytest.skip(reason[:200])
    assert name in ("equal", "refused"), reason
    if name == "equal":
        EQUAL.append(model_type)


def test_most_types_are_equal(request):
    # Last of this file. Only after the whole sweep, and only where the types are those that it was written for.
    if len(EQUAL) < 20 or len(sweep.MODEL_TYPES) < 190:
        pytest.skip("a part of the sweep, or another transformers")
    assert len(EQUAL) >= 110
