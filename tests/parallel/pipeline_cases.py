"""Model settings of the pipeline tests."""

TRAINING = {
    "plain": {},
    "tied": dict(tie_word_embeddings=True),
    "untrimmed_recompute": dict(parallel_attn_hatf=False, use_recompute=True),
}
VIRTUAL = {
    "even": dict(num_hidden_layers=8, virtual_pp_degree=2),
    "odd_tied": dict(num_hidden_layers=7, virtual_pp_degree=3, tie_word_embeddings=True),
}
