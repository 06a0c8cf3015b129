"""What several replicas share: small values by kind and key, in a folder or in Redis."""
