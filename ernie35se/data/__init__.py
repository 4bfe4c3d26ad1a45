"""Data for pretraining: token files, index maps, mixtures and datasets. Needs neither paddle nor paddlenlp."""
