"""From a model and prompts to text: filters on logits, the compiled loop, and what users call."""
