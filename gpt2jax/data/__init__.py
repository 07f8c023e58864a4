"""Text -> token shards (`gpt2jax.data.prepare.prepare`), and tokens -> batches (`open_splits`)."""

from gpt2jax.data.batches import IGNORED, TokenData, open_data
from gpt2jax.data.resolve import default_cache_dir, open_splits, resolve_source
from gpt2jax.data.shards import Manifest, SplitInfo, open_shard, read_header, read_manifest, write_shard

__all__ = [
    "IGNORED", "Manifest", "SplitInfo", "TokenData", "default_cache_dir", "open_data", "open_shard", "open_splits", "read_header",
    "read_manifest", "resolve_source", "write_shard",
]  # fmt: skip
