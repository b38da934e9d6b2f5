"""Moving bytes between ranks."""
