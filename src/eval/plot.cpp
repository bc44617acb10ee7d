#include "eval/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace crumb {

namespace {

constexpr double kGlyph = 5.8;  // width of a letter of 10 units, on average
constexpr double kPointRadius = 3.5;

struct Tick {
    double value;
    std::string text;
};

double linear_step(double range) {
    const double power = std::pow(10.0, std::floor(std::log10(range / 4)));
    for (const double step : {1.0, 2.0, 5.0, 10.0}) {
        if (range / (step * power) <= 5) { return step * power; }
    }
    return 10 * power;
}

std::vector<Tick> ticks_of(const Axis& axis) {
    std::vector<Tick> ticks;
    if (!axis.logarithmic) {
        const double step = linear_step(axis.high - axis.low);
        for (double v = axis.low; v <= axis.high + step / 2; v += step) { ticks.push_back({v, fmt::format("{:g}", std::abs(v) < step / 1e3 ? 0 : v)}); }
        return ticks;
    }
    const double decades = std::log10(axis.high / axis.low);
    for (double power = std::pow(10.0, std::floor(std::log10(axis.low))); power <= axis.high * 1.001; power *= 10) {
        for (const int digit : {1, 2, 3, 4, 5, 6, 8}) {
            const bool wanted = digit == 1 || (decades < 3 && (digit == 2 || digit == 5)) || (decades < 1.2 && (digit == 3 || digit == 4)) || decades < 0.7;
            const double v = digit * power;
            if (wanted && v >= axis.low * 0.999 && v <= axis.high * 1.001) { ticks.push_back({v, fmt::format("{:g}", v)}); }
        }
    }
    return ticks;
}

double share(const Axis& axis, double value) {
    const double t = axis.logarithmic ? std::log(std::max(value, axis.low) / axis.low) / std::log(axis.high / axis.low)
                                      : (value - axis.low) / (axis.high - axis.low);
    return std::clamp(t, 0.0, 1.0);
}

}  // namespace

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        switch (c) {
            case '&': result += "&amp;"; break;
            case '<': result += "&lt;"; break;
            case '>': result += "&gt;"; break;
            case '"': result += "&quot;"; break;
            default:
                // Control characters are no XML, and no use.
                result += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
        }
    }
    return result;
}

Axis axis_around(std::string title, const std::vector<double>& values, bool logarithmic) {
    Axis axis{std::move(title), logarithmic ? 1e300 : 0, logarithmic ? 0 : 1e-300, logarithmic};
    for (const double v : values) {
        if (!std::isfinite(v) || (logarithmic && v <= 0)) { continue; }
        axis.low = std::min(axis.low, v);
        axis.high = std::max(axis.high, v);
    }
    if (logarithmic) {
        if (axis.low > axis.high) { return {axis.title, 0.1, 1, true}; }
        axis.low /= 1.25;
        axis.high *= 1.25;
    } else {
        const double step = linear_step(axis.high - axis.low);
        axis.low = std::floor(axis.low / step) * step;
        axis.high = std::ceil(axis.high / step) * step;
    }
    return axis;
}

Plot::Plot(std::string description, Axis x, Axis y, double height)
    : description_(std::move(description)), x_(std::move(x)), y_(std::move(y)), height_(height) {}

double Plot::x(double value) const { return kLeft + share(x_, value) * (kWidth - kLeft - kRight); }
double Plot::y(double value) const { return bottom() - share(y_, value) * (bottom() - kTop); }

void Plot::line(const std::vector<std::pair<double, double>>& points, std::string_view css) {
    body_ += fmt::format("<polyline class=\"{}\" points=\"", css);
    for (const auto& [px, py] : points) { body_ += fmt::format("{:.1f},{:.1f} ", x(px), y(py)); }
    body_ += "\"/>\n";
    for (size_t i = 1; i < points.size(); ++i) {
        const auto [left, right] = std::minmax({x(points[i - 1].first), x(points[i].first)});
        const auto [top, bottom] = std::minmax({y(points[i - 1].second), y(points[i].second)});
        if (left == right || top == bottom) { taken_.push_back({left - 1, top - 1, right + 1, bottom + 1}); }  // steps
    }
}

void Plot::error_bar(double at, double low, double high, std::string_view css) {
    body_ += fmt::format("<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", css, x(at), x(at), y(low), y(high));
}

void Plot::point(double px, double py, std::string_view css, const std::string& hover) {
    body_ += fmt::format("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"><title>{}</title></circle>\n", css, x(px), y(py), kPointRadius, escaped(hover));
    taken_.push_back({x(px) - kPointRadius, y(py) - kPointRadius, x(px) + kPointRadius, y(py) + kPointRadius});
}

void Plot::bar(double from, double to, double py, std::string_view css, const std::string& hover) {
    body_ += fmt::format("<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"><title>{}</title></rect>\n", css, x(from), y(py),
                         x(to) - x(from), bottom() - y(py), escaped(hover));
}

void Plot::label(double px, double py, const std::string& text, std::string_view css) {
    const double w = kGlyph * double(text.size()), h = 10, gap = kPointRadius + 2, cx = x(px), cy = y(py);
    const std::pair<double, double> places[] = {{cx + gap, cy - h / 2}, {cx - gap - w, cy - h / 2},     {cx - w / 2, cy - gap - h}, {cx - w / 2, cy + gap},
                                                {cx + gap, cy - h - 1}, {cx + gap, cy + 1}, {cx - gap - w, cy - h - 1}, {cx - gap - w, cy + 1}};
    for (const auto& [left, top] : places) {
        const Box box{left, top, left + w, top + h};
        const bool inside = box.left > kLeft && box.right < kWidth && box.top > 0 && box.bottom < bottom();
        const bool free = std::ranges::none_of(taken_, [&](const Box& b) { return b.left < box.right && box.left < b.right && b.top < box.bottom && box.top < b.bottom; });
        if (!inside || !free) { continue; }
        taken_.push_back(box);
        body_ += fmt::format("<text class=\"label {}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", css, left, top + h - 1.5, escaped(text));
        return;
    }
}

std::string Plot::svg() const {
    std::string text = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" xmlns=\"http://www.w3.org/2000/svg\">\n", kWidth, height_, escaped(description_));
    for (const Tick& tick : ticks_of(x_)) {
        text += fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text class=\"tick mid\" x=\"{0:.1f}\" y=\"{3}\">{4}</text>\n",
                            x(tick.value), kTop, bottom(), bottom() + 13, tick.text);
    }
    for (const Tick& tick : ticks_of(y_)) {
        text += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text class=\"tick end\" x=\"{3}\" y=\"{4:.1f}\">{5}</text>\n", kLeft,
                            kWidth - kRight, y(tick.value), kLeft - 4, y(tick.value) + 3.5, tick.text);
    }
    text += fmt::format("<text class=\"axis mid\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", (kLeft + kWidth - kRight) / 2, height_ - 6, escaped(x_.title));
    text += fmt::format("<text class=\"axis mid\" transform=\"rotate(-90)\" x=\"{:.1f}\" y=\"10\">{}</text>\n", -(kTop + bottom()) / 2, escaped(y_.title));
    return text + body_ + "</svg>\n";
}

std::string heat_map(const std::string& description, const std::vector<std::string>& columns, const std::vector<HeatRow>& rows) {
    constexpr double name = 104, last = 62, line = 22, top = 16;
    const double cell = (Plot::kWidth - name - last) / double(columns.size());
    std::string text = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" xmlns=\"http://www.w3.org/2000/svg\">\n", Plot::kWidth,
                                   top + line * double(rows.size()) + 4, escaped(description));
    for (size_t c = 0; c < columns.size(); ++c) {
        text += fmt::format("<text class=\"tick mid\" x=\"{:.1f}\" y=\"11\">{}</text>\n", name + cell * (double(c) + 0.5), escaped(columns[c]));
    }
    for (size_t r = 0; r < rows.size(); ++r) {
        const double y = top + line * double(r);
        text += fmt::format("<text class=\"label\" x=\"0\" y=\"{:.1f}\">{}</text>\n", y + 14, escaped(rows[r].name));
        for (size_t c = 0; c < columns.size(); ++c) {
            const double share = rows[r].shares[c];
            const double x = name + cell * double(c);
            text += fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill-opacity=\"{:.2f}\"/>", share < 0 ? "empty" : "heat", x, y,
                                cell - 2, line - 2, share < 0 ? 1.0 : 0.06 + 0.94 * share);
            if (share >= 0) {
                text += fmt::format("<text class=\"cell mid{}\" x=\"{:.1f}\" y=\"{:.1f}\">{:.0f}</text>\n", share > 0.55 ? " full" : "", x + cell / 2 - 1, y + 14, 100 * share);
            }
        }
        text += fmt::format("<text class=\"tick end\" x=\"{}\" y=\"{:.1f}\">{}</text>\n", Plot::kWidth, y + 14, escaped(rows[r].last));
    }
    return text + "</svg>\n";
}

}  // namespace crumb
