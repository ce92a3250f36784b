"""Our environment variables, which ``opentelemetry-instrument`` offers as command line options."""

OTEL_ROLLOUT_FILE = "OTEL_ROLLOUT_FILE"
OTEL_ROLLOUT_IMAGES = "OTEL_ROLLOUT_IMAGES"
OTEL_ROLLOUT_TOKENS = "OTEL_ROLLOUT_TOKENS"
