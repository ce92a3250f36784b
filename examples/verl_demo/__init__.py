"""A real verl rollout on a CPU with a scripted policy, recorded by otel-rollout."""
