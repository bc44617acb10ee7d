"""Plots without a plotting library: text, lines and bars in one SVG file, readable in a browser and on a page of the docs."""
from html import escape
from pathlib import Path

COLOURS = ["#0b6e99", "#c4572b", "#4c8c2b", "#7d4fa3", "#a88a00", "#555555"]


class Svg:
    def __init__(self, width, height):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
                      f'<rect width="{width}" height="{height}" fill="white"/>']

    def text(self, x, y, text, anchor="start", colour="#222", size=None, halo=False):
        """halo: a white edge, for a text that lies on lines."""
        more = (f' font-size="{size}"' if size else "") + (' stroke="white" stroke-width="3" paint-order="stroke"' if halo else "")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(str(text))}</text>')

    def line(self, points, colour="#ccc", width=1):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def bar(self, x, y, width, height, colour):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def save(self, path):
        Path(path).write_text("\n".join(self.parts + ["</svg>"]) + "\n")
