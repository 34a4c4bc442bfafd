// Appended to a copy of the report by the test: what a reader sees of it, as JSON in the page.
function rgb(text) {
    const numbers = text.match(/[\d.]+/g).map(Number);
    return numbers.length > 3 && numbers[3] === 0 ? null : numbers.slice(0, 3);
}

// WCAG 2.1.
function luminance(color) {
    const parts = color.map((value) => {
        const part = value / 255;
        return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}

function contrast(one, other) {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
}

function background(element) {
    for (let at = element; at; at = at.parentElement) {
        const color = rgb(getComputedStyle(at).backgroundColor);
        if (color) return color;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
}

const hasText = (element) =>
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
const isShown = (element) => element.getClientRects().length > 0 && !element.closest("title, style, script");
const texts = [...document.body.querySelectorAll("*")].filter((element) => hasText(element) && isShown(element));
const faint = texts
    .map((element) => {
        const style = getComputedStyle(element);
        const color = rgb(element instanceof SVGElement ? style.fill : style.color);
        return [element.textContent.trim().slice(0, 40), contrast(color, background(element))];
    })
    .filter(([, ratio]) => ratio < 4.5);
const cut = texts
    .filter((element) => {
        const box = element.getBoundingClientRect();
        return (box.right > innerWidth + 1 || box.left < -1) && !element.closest(".scroll");
    })
    .map((element) => element.textContent.trim().slice(0, 40));
const charts = [...document.querySelectorAll("svg")].map((chart) => {
    const box = chart.getBoundingClientRect();
    const fills = [...chart.querySelectorAll("rect, path, line")].map((shape) => getComputedStyle(shape).fill);
    return { width: box.width, height: box.height, colors: new Set(fills).size };
});
const legend = [...document.querySelectorAll(".swatch")].map((swatch) => getComputedStyle(swatch).backgroundColor);
const result = document.createElement("pre");
result.id = "measured";
result.textContent = JSON.stringify({
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    width: innerWidth,
    texts: texts.length,
    faint,
    cut,
    charts,
    legend,
    loaded: performance.getEntriesByType("resource").length,
    overflow: document.documentElement.scrollWidth - innerWidth,
});
document.body.append(result);
