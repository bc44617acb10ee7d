// SVG without a library: one frame with two axes, drawn into a box of 400 units, so that text of 11 units is readable on a
// phone. Colours are the page's CSS classes, so a plot follows its light and dark scheme. All of it is well-formed XML.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace crumb {

std::string escaped(std::string_view text);  // for XML text and attributes

struct Axis {
    std::string title;
    double low = 0, high = 1;
    bool logarithmic = false;
};

// An axis around these values: from 0 if it is linear, whole ticks at both ends. Not finite ones, and for a logarithmic axis
// those that are not positive, do not count.
Axis axis_around(std::string title, const std::vector<double>& values, bool logarithmic);

class Plot {
  public:
    static constexpr double kWidth = 400, kLeft = 46, kRight = 12, kTop = 10, kBottom = 36;

    Plot(std::string description, Axis x, Axis y, double height = 260);

    // Places of values; what lies outside the axes is put at their ends.
    double x(double value) const;
    double y(double value) const;
    double bottom() const { return height_ - kBottom; }

    // `css`: a class of the page. `hover`: what a pointer over it shows.
    void line(const std::vector<std::pair<double, double>>& points, std::string_view css);
    void error_bar(double x, double low, double high, std::string_view css);
    void point(double x, double y, std::string_view css, const std::string& hover);
    void bar(double from, double to, double y, std::string_view css, const std::string& hover);
    // Beside a point, at the first of eight places that is free; left out if none is. Call it for the important ones first,
    // after all points are drawn.
    void label(double x, double y, const std::string& text, std::string_view css);

    std::string svg() const;

  private:
    struct Box {
        double left, top, right, bottom;
    };
    std::string description_;
    Axis x_, y_;
    double height_;
    std::string body_;
    std::vector<Box> taken_;
};

// A field of cells, a row a line, each with its share 0..1 as shade and as per cent; negative: no value.
struct HeatRow {
    std::string name;
    std::vector<double> shares;
    std::string last;  // text behind the cells
};
std::string heat_map(const std::string& description, const std::vector<std::string>& columns, const std::vector<HeatRow>& rows);

}  // namespace crumb
