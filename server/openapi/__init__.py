"""`/openapi.json`, made from the routes and the structs that they decode and encode."""
