"""The network: one component a file, each a Flax NNX module that is a plain JAX pytree."""
