"""Several models behind one address: which there are, which of them are loaded, and the endpoints that manage them."""
