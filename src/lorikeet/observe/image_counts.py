"""Counts the images of prompts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.observe.metric_families import MetricFamilies


@dataclass
class ImageCounts:
    """Counts since the start of the server.

    Attributes:
        images: images that were read.
        bytes: size of their files.
        seconds: time to decode and process them, until the tensors were there.
        refused: requests that were refused because of an image.
    """

    images: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: int = 0

    def add(self, images: int, file_bytes: int, seconds: float) -> None:
        """Count the images of a prompt."""
        self.images += images
        self.bytes += file_bytes
        self.seconds += seconds


class ImageCollector(Collector):
    """Collects the metrics of images.

    Args:
        counts: the counts.
        labels: labels of every metric.
    """

    def __init__(self, counts: ImageCounts, labels: Mapping[str, str]) -> None:
        self._counts = counts
        self._families = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        counts = self._counts
        count = self._families.count
        yield count("lorikeet:images", "Images of prompts that were decoded.", counts.images)
        yield count("lorikeet:image_bytes", "Bytes of the files of these images.", counts.bytes)
        yield count("lorikeet:image_read_seconds", "Time to decode and process these images.", counts.seconds)
        yield count("lorikeet:image_rejections", "Requests refused because of an image.", counts.refused)
