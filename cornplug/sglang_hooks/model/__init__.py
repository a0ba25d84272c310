"""Identity of the model that SGLang runs, and checks whether SGLang's settings allow sharing."""
