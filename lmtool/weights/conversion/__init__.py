"""What import and export convert: architectures, vocabularies, adapters, word vectors."""
