"""What was tuned, in the layout of the library PEFT, both ways: a file a kind of method, none a family."""
