"""Draft tokens at how sequences go on, which the model then confirms or not."""
