"""Images of a prompt as plain data: the tensors that a model's image processor made of them, and their places."""

import msgspec


class ImageTokens(msgspec.Struct, frozen=True):
    """The texts that stand for images in a model's prompts.

    Attributes:
        placeholder: stands for an image in a prompt from the chat template.
        embedding: the token that the model replaces by embeddings of an image. It is often the placeholder.
    """

    placeholder: str
    embedding: str


class ImageTensor(msgspec.Struct, frozen=True):
    """One output of an image processor.

    Attributes:
        dtype: numpy's name of the dtype, such as ``float32``, ``int64`` or ``bool``.
        shape: sizes of the dimensions.
        data: the numbers in C order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PromptImage(msgspec.Struct, frozen=True):
    """One image of a prompt.

    The tokens from ``offset`` on are the smallest range that contains all placeholders of the image. Some models write
    other tokens between placeholders, such as the ends of rows. The embeddings of the image replace, in order, those of
    the tokens in the range that have the model's ``image_token_id``.

    Attributes:
        digest: SHA-256 of the image processor's identity and options, and of the decoded pixels. Equal digests mean
            equal tensors.
        offset: position in the prompt of the image's first placeholder.
        length: number of tokens up to the last placeholder, at least 1.
        tensors: outputs of the model's image processor for this image alone, by their names, such as ``pixel_values``
            and ``image_grid_thw``.
    """

    digest: bytes
    offset: int
    length: int
    tensors: dict[str, ImageTensor]
