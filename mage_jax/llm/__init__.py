"""Language-model client: offline, replay and HTTP backends, strict JSON, usage and cost records."""
