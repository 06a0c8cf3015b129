"""`/v1/responses` on the chat path: items to messages, pieces to items, and responses that are kept."""
