"""Models written anew in fewer bits: to GGUF files, and to folders that other servers read too."""
