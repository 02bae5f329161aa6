"""Noise that belongs to a text: a function of seed, position and token, and of the right law."""

import kit
import pytest
import torch
from scipy.stats import chisquare, kstest

import tetris_hf
from tetris_hf.generation.fusing import fusing
from tetris_hf.generation.seeded_noise import gumbel_noise, row_seeds


MASK = 2**64 - 1


def splitmix(number: int) -> int:
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def naive_noise(seed: int, position: int, token: int) -> float:
    place = splitmix((splitmix(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK)
    bits = splitmix((place + token * 0x9E3779B97F4A7C15) & MASK) >> 32
    uniform = torch.tensor((bits + 0.5) / 2**32, dtype=torch.float64)
    return float(-(-torch.log1p(-uniform)).log())


@kit.compiled_or_not
@pytest.mark.parametrize("vocab_size", [9, 40, 77])  # less and more than vectors of a CPU hold
def test_noise_is_that_of_the_naive_reference(vocab_size, compiled):
    seeds, positions = torch.tensor([0, 5, -3, 2**62]), torch.tensor([0, 1, 77, 4000])
    with fusing(compiled):
        noise = gumbel_noise(seeds, positions, vocab_size)
    for i in range(4):
        for token in range(vocab_size):
            assert float(noise[i, token]) == pytest.approx(
                naive_noise(int(seeds[i]), int(positions[i]), token), abs=1e-5
            )


def test_the_largest_of_scores_plus_noise_follows_their_softmax():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds = row_seeds(1, 20_000)
    first, second = (
        (p.log() + gumbel_noise(seeds, torch.full_like(seeds, position), 4)).argmax(-1) for position in (3, 4)
    )
    joint = torch.bincount(first * 4 + second, minlength=16)
    assert chisquare(joint.numpy(), (p[:, None] * p * len(seeds)).flatten().double().numpy()).pvalue > 1e-3
    # Neighbouring seeds, positions and tokens are unrelated.
    noise = gumbel_noise(torch.arange(50), torch.arange(50), 200).flatten().double().numpy()
    assert kstest(noise, "gumbel_r").pvalue > 1e-3


def test_seeds_of_rows():
    assert row_seeds([4, 9], 2).tolist() == [4, 9] and row_seeds(torch.tensor([4]), 1).tolist() == [4]
    assert row_seeds(3, 5)[2:].tolist() == row_seeds(3, 3, first=2).tolist()
    assert len(set(row_seeds(0, 1000).tolist()) | set(row_seeds(1, 1000).tolist())) == 2000
    for seed, rows in ((1.5, 1), ("a", 1), ([1, 2], 3), (True, 1), (2**63, 1)):
        with pytest.raises(ValueError, match="`seed`"):
            row_seeds(seed, rows)


@pytest.fixture
def enabled():
    tetris_hf.enable()
    yield
    tetris_hf.disable()


def test_a_text_is_a_function_of_prompt_and_seed(enabled):
    """Whoever drafts, whatever is selected, wherever a row stands."""
    target, batch = kit.tiny(), kit.ragged()
    settings = {"do_sample": True, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.1, "max_new_tokens": 12}
    rows = len(batch["input_ids"])
    seeds = list(range(40, 40 + rows))
    plain = target.generate(**batch, tetris_capacity=0, tetris_seed=seeds, **settings)
    for capacity, selector in ((3, None), (2, tetris_hf.TetrisSelector(score="paper"))):
        drafted = target.generate(
            **batch, assistant_model=kit.near(target), tetris_capacity=capacity, num_assistant_tokens=3,
            tetris_selector=selector, tetris_seed=seeds, **settings,
        )  # fmt: skip
        assert torch.equal(drafted, plain)
    width = batch["input_ids"].shape[1]
    for row in range(rows):
        one = {name: values[row : row + 1] for name, values in batch.items()}
        text = target.generate(**one, tetris_capacity=0, tetris_seed=seeds[row : row + 1], **settings)
        assert text[0, width:].tolist() == plain[row, width : text.shape[1]].tolist()
    other = target.generate(**batch, tetris_capacity=0, tetris_seed=1, **settings)
    assert not torch.equal(other[:, width:], plain[:, width:])


def test_a_seed_without_our_decoding_is_refused(enabled):
    with pytest.raises(ValueError, match="`tetris_seed` needs `tetris_capacity`"):
        kit.tiny().generate(**kit.ragged(), tetris_seed=1, max_new_tokens=2)
