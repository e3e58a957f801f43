"""Images in prompts: settings of each family of vision models, and the text that stands for an image.

Pure: the image process (`treadle.media`) makes pixels. A text worker writes an image's text from the sizes of its
views.
"""

from __future__ import annotations

from .base import ImageSettings as ImageSettings
from .base import Layout as Layout
from .families import AnySettings as AnySettings
from .families import read_image_settings as read_image_settings
from .source import ImageSource as ImageSource
