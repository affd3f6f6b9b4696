"""Log-probabilities."""

import torch

from kernels import reference


def test_token_logprobs() -> None:
    logits, chosen = torch.randn(4, 50).bfloat16(), torch.tensor([3, 0, 49, 7])
    logprob, rank, top_ids, top_logprobs = reference.token_logprobs(logits, chosen, 5)
    want = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprob, want[range(4), chosen])
    torch.testing.assert_close(top_logprobs, want.sort(descending=True).values[:, :5])
    torch.testing.assert_close(want.gather(1, top_ids), top_logprobs)
    assert rank.tolist() == [1 + sum(x > row[c] for x in row) for row, c in zip(logits, chosen, strict=True)]
    assert reference.token_logprobs(logits, chosen, 0)[2].shape == (4, 0)
