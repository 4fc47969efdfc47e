"""One paged decoder for the Llama, Mistral, Qwen2 and Qwen3 families: its spec, its weights, its forward pass."""
