"""What users write: the JSON of vLLM's --speculative-config, the engine's settings, the training settings."""
