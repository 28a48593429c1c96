"""How text becomes tokens: train, load, save. Over the `tokenizers` library, in Hugging Face's file layout."""
