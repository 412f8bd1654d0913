"""Multilingual: translate into and out of English, answer in another language, explain words and phrases.

For teachers that speak the languages (Qwen3); the embedded English recipe leaves this category out.
"""

import random

from scripts.families import Family
from scripts.families.words import (
    CONCEPTS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    clock_time,
    lines,
    number,
    slots,
)

# ------------------------------------------------------------------------------------------------------ lists
LANGUAGES = ("French", "German", "Spanish", "Italian", "Chinese", "Portuguese", "Dutch", "Japanese", "Polish",
             "Turkish")

ENGLISH = lines("""
    Where is the nearest pharmacy?
    I would like a table for {count} people at {time}.
    My name is {name}, and I work as {a_job}.
    How much does this {object} cost?
    The train to the airport leaves at {time}.
    We have been waiting for {count} hours.
    Please do not open the window, it is cold.
    I forgot my {object} at the hotel.
    {name} loves {hobby} but never has enough time.
    Could you speak a little more slowly, please?
    The soup was good, but I liked the {food} even more.
    If it rains tomorrow, we will stay at home.
    She has lived here for {count} years and still gets lost.
    Thank you for your help, {name}!
    The meeting was moved to {time} because {name} is ill.
    You can return the {object} within {count} days.
""")
# Sentences of ours, by language; {name}, {count} and {time} work in all of them.
FOREIGN = {
    "French": lines("""
        Bonjour {name}, peux-tu m'appeler demain à {count} heures ?
        Nous cherchons un appartement de {count} pièces près de la gare.
        Le magasin est fermé le dimanche, mais le marché est ouvert.
        {name} a oublié son parapluie dans le bus.
        Je voudrais réserver une chambre pour {count} nuits.
    """),
    "German": lines("""
        Guten Tag, ich habe einen Termin bei Frau {name}.
        Der Zug nach Hamburg hat {count} Minuten Verspätung.
        {name} möchte am Wochenende mit uns wandern gehen.
        Wir brauchen noch {count} Stühle für das Fest.
        Könnten Sie mir bitte sagen, wo die Bibliothek ist?
    """),
    "Spanish": lines("""
        Hola {name}, ¿quieres cenar con nosotros esta noche?
        La tienda abre dentro de {count} minutos.
        {name} perdió las llaves y no puede entrar en casa.
        Necesito {count} manzanas y un poco de queso.
        Mi hermana estudia medicina y trabaja los fines de semana.
    """),
    "Italian": lines("""
        Ciao {name}, ci vediamo tra {count} minuti davanti al cinema.
        Vorrei un caffè e {count} cornetti, per favore.
        {name} suona la chitarra da {count} anni.
        Il museo è chiuso per lavori fino a lunedì.
        Non ho capito la domanda, può ripetere?
    """),
    "Portuguese": lines("""
        Olá {name}, o jantar fica pronto em {count} minutos.
        O autocarro já partiu, temos de esperar pelo próximo.
        {name} comprou {count} livros na feira.
        Amanhã vai chover, leva um guarda-chuva.
    """),
    "Dutch": lines("""
        Hallo {name}, kun je morgen {count} broden meenemen?
        De fiets staat al {count} dagen voor het station.
        {name} houdt van koken, maar niet van afwassen.
        We gaan met de trein omdat de auto kapot is.
    """),
    "Chinese": lines("""
        {name}，你明天有空吗？我们一起吃午饭吧。
        从这里到火车站走路需要{count}分钟。
        {name}每天早上跑步{count}公里。
        请问，这件衣服多少钱？
        我想订一个{count}人的房间。
    """),
    "Japanese": lines("""
        {name}さん、明日の会議は何時からですか。
        駅まで歩いて{count}分かかります。
        {name}さんは犬を{count}匹飼っています。
        すみません、図書館はどこですか。
    """),
}
# Questions asked in the language itself: they are answered in it without being told to.
QUESTIONS = lines("""
    Donne-moi {count} idées courtes pour un week-end avec {name}.
    Quel cadeau offrir à {name}, qui aime {hobby_fr} ? Une seule phrase.
    Explique en une phrase à quoi sert {object_fr}.
    Nenne mir {count} kurze Tipps, um besser zu schlafen.
    Schreibe {name} in zwei Sätzen, dass ich {count} Minuten später komme.
    Erkläre einem Kind in einem Satz, warum es regnet. Das Kind heißt {name}.
    Escribe un mensaje corto a {name}: llego {count} minutos tarde.
    ¿Qué puedo cocinar con {count} huevos y un tomate? Una idea, en una frase.
    Dime {count} palabras que describan el mar.
    Scrivi una frase gentile per il compleanno di {name}, che compie {count_big} anni.
    Consigliami un piatto semplice per {count} persone, in una frase.
    Escreve uma frase curta de agradecimento a {name}.
    用一句话向{name}解释什么是{thing_zh}。
    给我{count}个学习英语的小建议，每个不超过十五个字。
    帮我写一条短信给{name}：我会晚到{count}分钟。
    {name}さんへの短いお礼のメッセージを一文で書いてください。
    Geef {name} in één zin een tip om {count} kilo lichter te reizen.
""")
HOBBIES_FR = ("le jardinage", "la lecture", "le vélo", "la cuisine", "la photo", "le chant", "les échecs")
OBJECTS_FR = ("une boussole", "un tournevis", "un arrosoir", "une agrafeuse", "un thermomètre", "une échelle")
THINGS_ZH = ("重力", "光合作用", "通货膨胀", "人工智能", "彩虹", "疫苗", "月食", "回收", "保险", "地震")
PHRASES = lines("""
    c'est la vie
    bon appétit
    déjà vu
    Fingerspitzengefühl
    Schadenfreude
    Feierabend
    sobremesa
    mañana
    dolce vita
    allora
    saudade
    gezellig
    hygge
    tsundoku
    加油
    马马虎虎
""")


# --------------------------------------------------------------------------------------------------- fillings
_INNER = slots(name=NAMES, count=number(2, 12), time=clock_time, job=JOBS, object=OBJECTS,
               hobby=HOBBIES, food=FOODS, count_big=number(18, 90), hobby_fr=HOBBIES_FR, object_fr=OBJECTS_FR,
               thing_zh=THINGS_ZH)


def _english(rng: random.Random) -> str:
    return rng.choice(ENGLISH).format(**_INNER(rng))


def _foreign(rng: random.Random) -> dict[str, str]:
    language = rng.choice(tuple(FOREIGN))
    return {"language": language, "sentence": rng.choice(FOREIGN[language]).format(**_INNER(rng)),
            "target": rng.choice([other for other in LANGUAGES if other != language])}


# --------------------------------------------------------------------------------------------------- families
INTO = Family("translate_into", "multilingual", (
    "Translate into {language}: {sentence}",
    "How do you say \"{sentence}\" in {language}? Only the translation.",
    "{sentence}\n\nPlease give me this in {language} and in {language2}, one line each.",
    "Translate to polite, formal {language}:\n{sentence}",
    "{language} version of \"{sentence}\", with the pronunciation in brackets.",
    "I want to text this to a friend in {language}: {sentence}",
    "Translate and then explain one word of the translation: \"{sentence}\" ({language})",
), slots(language=LANGUAGES[:5], language2=LANGUAGES[5:], sentence=_english))

FROM = Family("translate_from", "multilingual", (
    "Translate into English: {sentence}",
    "What does this mean? {sentence}",
    "Which language is this, and what does it say? One line.\n\n{sentence}",
    "Translate this {language} sentence into {target}: {sentence}",
    "{sentence}\n\nReply to this message in the same language, in one sentence.",
    "Pick one verb in this {language} sentence and give its infinitive and its English meaning: {sentence}",
    "Rewrite in {language} so that it is a question (or, if it is one, a statement): {sentence}",
), _foreign)

ANSWER_IN = Family("answer_in", "multilingual", (
    "Answer in {language}, in one sentence: what is {concept}?",
    "Explain {concept} in {language}, for {a_job}. At most 30 words.",
    "Write a {language} sentence about {hobby} and translate it into English.",
    "In {language}, give one tip for someone who likes {hobby}.",
    "Write a two-line dialogue in {language} between {a_job} and a customer who wants {a_object}.",
    "Name three {language} words that have to do with {hobby}, with English meanings.",
    "Please reply in {language} only: why is {hobby} good for {a_job}? One sentence.",
), slots(language=LANGUAGES, concept=CONCEPTS, job=JOBS, hobby=HOBBIES,
         object=OBJECTS))

NATIVE = Family("asked_in", "multilingual", (
    "{question}",
    "{question}\n\n(No English, please.)",
    "{question} 🙂",
    "Answer in the language of the question, briefly: {question}",
    "{question}\nThen repeat your answer in English.",
), slots(question=lambda rng: rng.choice(QUESTIONS).format(**_INNER(rng))))

PHRASE = Family("words_and_phrases", "multilingual", (
    "What does \"{phrase}\" mean, and in which language? Explain it to {name} in one sentence.",
    "Use \"{phrase}\" in a sentence of its own language about {hobby}, then translate it.",
    "How do you say \"{object}\" in {language}, with the article if there is one?",
    "Count from one to {count} in {language}, on one line. Add the word for \"{object}\".",
    "Give the {language} for these words, separated by commas: {object}, {food}, {hobby}.",
    "Write a short greeting in {language} to {name}, who works as {a_job}.",
    "Is \"{phrase}\" polite? When would {name} say it to {a_job}? Two short sentences.",
), slots(phrase=PHRASES, name=NAMES, hobby=HOBBIES, object=OBJECTS, language=LANGUAGES, count=number(3, 10),
         food=FOODS,
         job=JOBS))

FAMILIES = (INTO, FROM, ANSWER_IN, NATIVE, PHRASE)
